{{- define "kvbridge.image" -}}
{{- .repository -}}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end -}}
{{- end -}}

{{- define "kvbridge.own" -}}
{{- $image := .Values.image -}}
{{- include "kvbridge.image" (merge (dict "tag" ($image.tag | default .Chart.AppVersion)) (omit $image "tag")) -}}
{{- end -}}

{{/* What selects the pods of one component: (list root component) */}}
{{- define "kvbridge.selector" -}}
app.kubernetes.io/name: kvbridge
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvbridge.labels" -}}
{{ include "kvbridge.selector" . }}
app.kubernetes.io/part-of: kvbridge
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end -}}

{{/* Settings as variables of a daemon, one for each section at the top. Kubernetes fills in $(POD_IP). */}}
{{- define "kvbridge.variables" -}}
{{- range $key, $value := . -}}
- name: KVBRIDGE_{{ upper $key }}
  value: {{ (kindIs "string" $value) | ternary $value (toJson $value) | quote }}
{{ end -}}
{{- end -}}

{{- define "kvbridge.pod-names" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* What the pods of all components have in common: (list root component) */}}
{{- define "kvbridge.pod" -}}
{{- with (index . 0).Values.imagePullSecrets -}}
imagePullSecrets: {{ toJson . }}
{{ end -}}
{{- with (index . 0).Values.priorityClass.name -}}
priorityClassName: {{ . }}
{{ end -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- $user := eq (index . 1) "redis" | ternary 999 10001 }}
# The group reads the keys, which root owns.
securityContext: {runAsNonRoot: true, runAsUser: {{ $user }}, runAsGroup: {{ $user }}, fsGroup: {{ $user }}, seccompProfile: {type: RuntimeDefault}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ include "kvbridge.selector" . | fromYaml | toJson }}}
{{- end -}}

{{/* An object's head, and a budget of disruptions: (list root component) */}}
{{- define "kvbridge.head" -}}
metadata:
  name: {{ (index . 0).Release.Name }}-{{ index . 1 }}
  labels: {{- include "kvbridge.labels" . | nindent 4 }}
{{- end -}}

{{- define "kvbridge.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "kvbridge.head" . }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "kvbridge.selector" . | nindent 6 }}
{{- end -}}

{{- define "kvbridge.bootstrap-url" -}}
http://{{ .Release.Name }}-bootstrap:7900
{{- end -}}

{{/* The configuration of a node, as a mapping: (list root role). */}}
{{- define "kvbridge.node" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $port := eq $role "prefill" | ternary 7901 7902 -}}
{{- $host := ne $root.Values.dataNetwork.attachment "" | ternary $root.Values.dataNetwork.interface "$(POD_IP)" -}}
{{- with $root.Values.transports -}}
instance: $(POD_NAME)
engine_url: {{ eq $root.Values.engine "own" | ternary "" "http://$(POD_IP):8000" | quote }}
http: {host: 0.0.0.0, port: {{ $port }}, advertise_url: "http://$(POD_IP):{{ $port }}", token_file: /keys/nodes.token}
bootstrap: {url: {{ include "kvbridge.bootstrap-url" $root }}, token_file: /keys/bootstrap.token}
control:
  {{- if eq $role "prefill" }}
  bind: tcp://0.0.0.0:7911
  advertise: tcp://$(POD_IP):7911
  {{- end }}
  curve: {secret_key_file: /keys/$(POD_NAME).key, allowed_keys_file: /keys/allowed.keys}
transports:
  order: {{ toJson .order }}
  mooncake: {host: {{ $host | quote }}, protocol: {{ .protocol }}, device_name: {{ .devices | quote }}}
  nixl: {ucx_net_devices: {{ .devices | default (ne $root.Values.dataNetwork.attachment "" | ternary $root.Values.dataNetwork.interface "") | quote }}}
telemetry: {log_format: json}
{{- end -}}
{{- end -}}

{{/* With RDMA a container starts as root to keep the right to lock memory; locking-memory.sh goes on as user 10001 with that alone. */}}
{{- define "kvbridge.locking" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ eq .Values.engine "own" }}
{{- if eq .Values.transports.protocol "rdma" }}
  runAsUser: 0
  runAsGroup: 0
  runAsNonRoot: false
  capabilities: {drop: [ALL], add: [IPC_LOCK, SETUID, SETGID, SETPCAP]}
{{- else }}
  capabilities: {drop: [ALL]}
{{- end }}
{{- end -}}
